"""The code in README, CONTRIBUTING and docs, block by block, and the command that runs it."""
