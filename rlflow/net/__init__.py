"""Requests to servers, addresses, and calls of code that may not answer."""
