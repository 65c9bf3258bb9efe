"""`python -m swift_vlpack` is `vlpack`."""

from swift_vlpack.cli import main

raise SystemExit(main())
