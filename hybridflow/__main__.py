"""`python -m hybridflow plan ...`: the command line without its console script."""

import sys

from hybridflow.cli.commands import main

sys.exit(main())
