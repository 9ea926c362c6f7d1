from tests.model.page_files.pages import opened  # noqa: F401
