"""``python -m fastdata`` is the command ``fastdata``."""

import sys

from fastdata.tools.cli import main

sys.exit(main())
