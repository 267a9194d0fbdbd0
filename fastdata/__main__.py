"""``python -m fastdata`` is the command ``fastdata``."""

import sys

from fastdata.cli import main

sys.exit(main())
