"""The processes of `jaxserve serve`, from the listening sockets to the parsed request. No route is known here."""
