"""`python -m spec_cli` is `spec`."""

from spec_cli.main import main

main()
