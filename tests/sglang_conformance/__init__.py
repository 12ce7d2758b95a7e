"""SGLang's behaviour that realgraph builds on, for any server: the real one, and a stand-in for it."""
