"""Where bytes live and how they move: slots, arenas, the LMDB store, codecs, the mover."""
