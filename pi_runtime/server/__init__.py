"""An HTTP server for one model, in the forms of OpenAI and Ollama. Needs the extra `serve`."""
