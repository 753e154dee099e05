"""Problems of mathematics: made by rule or out of files, with answers that are checked."""
