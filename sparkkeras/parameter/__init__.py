"""The parameter server: update rules, the shared weights, who may update them, and the service that workers call."""
