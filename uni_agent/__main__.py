"""`python -m uni_agent` is the command line."""

import sys

from uni_agent.cli import main

sys.exit(main())
