"""From a configuration to a trainer that is ready to go."""
