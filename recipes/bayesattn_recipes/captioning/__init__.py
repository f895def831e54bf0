"""Image captioning with Att2in (Rennie et al., 2017): additive attention over image regions, one query per word."""
