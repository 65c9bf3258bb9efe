"""Run `vlpack` as `python -m swift_vlpack`."""

from swift_vlpack.cli import main

raise SystemExit(main())
