"""The demo: a small real model answers with and without the cache, in tiers so small that everything moves."""
