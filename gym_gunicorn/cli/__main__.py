"""``python -m gym_gunicorn.cli``."""

import sys

from gym_gunicorn.cli.main import main

sys.exit(main())
