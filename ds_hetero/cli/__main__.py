"""``python -m ds_hetero.cli``."""

import sys

from ds_hetero.cli import main

sys.exit(main())
