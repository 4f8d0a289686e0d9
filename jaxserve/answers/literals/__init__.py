"""Values as models write them, read as a stream: JSON and what is nearly JSON or Python, converted as a schema says."""
