"""How the bytes of blocks move between layouts: each mover with a host reference that is both oracle and fall-back."""
