"""The engine behind OpenAI's interface: HTTP with FastAPI and uvicorn, metrics, and a page."""
