"""Rates: how much of the service a tenant may use in a minute."""
