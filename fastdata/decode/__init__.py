"""Files and bytes to images, images to stored arrays and back: the door to PIL and simplejpeg."""

from fastdata.decode.images import (
    IMAGE_EXTENSIONS,
    CenterCrop,
    FastLoader,
    Interpolation,
    Resize,
    Size,
    decode_image,
    decoder_of,
    load_image,
    load_resized,
)
from fastdata.decode.planar import decode_planes_into, encode_planes
from fastdata.decode.problems import sample_error
from fastdata.decode.stored import (
    Planes,
    is_image,
    present,
    spec_of,
    tensor_class,
    to_image,
    to_pil,
    to_stored,
    without_exif,
)

__all__ = [
    "IMAGE_EXTENSIONS",
    "CenterCrop",
    "FastLoader",
    "Interpolation",
    "Planes",
    "Resize",
    "Size",
    "decode_image",
    "decode_planes_into",
    "decoder_of",
    "encode_planes",
    "is_image",
    "load_image",
    "load_resized",
    "present",
    "sample_error",
    "spec_of",
    "tensor_class",
    "to_image",
    "to_pil",
    "to_stored",
    "without_exif",
]
