"""Parts of a user's own, which tests name as own.MODULE.NAME beside `--allow own`."""
