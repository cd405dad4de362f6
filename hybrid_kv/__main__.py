"""`python -m hybrid_kv` is `hybrid-kv`."""

from hybrid_kv.cli.entry import main

if __name__ == "__main__":
    main()
