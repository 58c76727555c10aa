"""What each service offers, as messages and a method table; a service is met here first."""
