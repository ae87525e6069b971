"""Run the code blocks of README, CONTRIBUTING and docs."""
