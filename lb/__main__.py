"""`python -m lb`: the same as `skyserve-lb`."""

import sys

from lb.cli import main

sys.exit(main())
