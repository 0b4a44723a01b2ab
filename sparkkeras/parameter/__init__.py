"""The parameter server: update rules, the shared weights, the leases of workers, and the service that workers call."""
