"""The daemon: sessions over a Unix socket, descriptors over a second one, administration over HTTP."""
