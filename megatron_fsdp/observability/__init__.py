"""What a step did: timelines, the watch over ranks, the audit of the engine's promises."""
