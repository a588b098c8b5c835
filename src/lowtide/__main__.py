"""`python -m lowtide` is `lowtide`."""

from lowtide.cli import main

main()
