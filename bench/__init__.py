"""tiercache.bench."""
