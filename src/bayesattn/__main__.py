"""`python -m bayesattn` is the command line, for launchers that start modules (`accelerate launch -m bayesattn …`)."""

from bayesattn.cli import main

if __name__ == "__main__":
    main()
