"""Sites that train models of their own and meet now and then: levels of exchange, and gossip."""
