"""Record what Mosaic's own writer makes, for tests/test_formats.py: ``python record_mds.py ../recorded_mds.zip``.

Run it in an environment of its own with mosaicml-streaming==0.13.0, which wants an older numpy and transformers than
the other integrations.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from streaming import MDSWriter

COLUMNS = {
    "image": "png",
    "label": "int",
    "text": "str",
    "score": "float32",
    "facts": "json",
    "grey": "pil",
    "vector": "ndarray:float32:3",
    "table": "ndarray",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as archive:
        for compression in (None, "zstd:3", "gz:6", "bz2:6"):
            name = str(compression).partition(":")[0]
            with MDSWriter(out=f"{folder}/{name}", columns=COLUMNS, compression=compression, size_limit=900) as writer:
                for i in range(5):
                    pixels = np.arange(90, dtype=np.uint8).reshape(5, 6, 3) + np.uint8(i)
                    item = {"image": Image.fromarray(pixels), "grey": Image.fromarray(pixels[:, :, 0].copy())}
                    item |= {"label": i * 10, "text": f"ü{i}", "score": i / 2, "facts": {"a": [i]}}
                    item |= {"vector": np.full(3, i, np.float32), "table": np.full((2, 3), i, np.int16)}
                    writer.write(item)
            for path in sorted(Path(folder, name).iterdir()):
                archive.write(path, f"{name}/{path.name}")


if __name__ == "__main__":
    main()
