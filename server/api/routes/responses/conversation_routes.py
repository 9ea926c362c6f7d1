"""/v1/conversations: conversations that are kept under an id, and their items."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import LongJson, json_response
from server.api.answers.forwarded import forwarded
from server.api.request.kept_objects import check_metadata
from server.api.routes.endpoints import route
from server.api.routes.responses.conversation import Conversation, new_items
from server.api.routes.responses.items import KeptItem, items_list, items_page
from server.api.routes.responses.schemas import (
    ConversationChange,
    InputItem,
    NewConversation,
    NewItems,
)
from server.api.routes.responses.store import ResponseStore
from server.api.routes.responses.translation import check_included, first_reference, item_messages, items_work
from server.api.state import ServerState
from server.http.auth import current_key
from server.http.encoding import json_pieces
from server.http.request_error import NOT_FOUND, RequestError

CONVERSATIONS_PATH = "/v1/conversations"
ONE = f"{CONVERSATIONS_PATH}/{{id}}"


class Conversations:
    """Answers the routes of conversations, which are kept in the store of the responses."""

    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self._state = state
        self._store = store

    @route(f"POST {CONVERSATIONS_PATH}", NewConversation, with_bytes=True)
    async def create(self, request: Request, body: NewConversation, raw: bytes) -> Response:
        """Begins a conversation."""
        if (elsewhere := await forwarded(self._state, request, first_reference(body.items), raw)) is not None:
            return elsewhere
        check_metadata(body.metadata)
        conversation = Conversation(current_key.get(), body.metadata or {})
        conversation.add(await self._translated(conversation, body.items or []))
        self._store.put(conversation)
        return json_response(conversation.body())

    @route(f"GET {ONE}", is_kept=True)
    async def retrieve(self, request: Request) -> Response:
        """A conversation, without its items."""
        return json_response(self._find(request).body())

    @route(f"POST {ONE}", ConversationChange, is_kept=True)
    async def update(self, request: Request, body: ConversationChange) -> Response:
        """Changes the metadata of a conversation."""
        check_metadata(body.metadata)
        conversation = self._find(request)
        conversation.metadata = body.metadata or {}
        self._store.put(conversation)
        return json_response(conversation.body())

    @route(f"DELETE {ONE}", is_kept=True)
    async def delete(self, request: Request) -> Response:
        """Forgets a conversation.

        The responses of it stay.
        """
        conversation = self._find(request)
        self._store.remove(conversation.id)
        return json_response({"id": conversation.id, "object": "conversation.deleted", "deleted": True})

    @route(f"GET {ONE}/items", is_kept=True)
    async def list_items(self, request: Request) -> Response:
        """The items of a conversation."""
        check_included(request.query_params)
        items = [*self._find(request).items.values()]
        return LongJson(self._state.turns, json_pieces(items_page(items, request.query_params)))

    @route(f"POST {ONE}/items", NewItems, is_kept=True)
    async def create_items(self, request: Request, body: NewItems) -> Response:
        """Adds items to a conversation."""
        check_included(request.query_params)
        conversation = self._find(request)
        items = await self._translated(conversation, body.items)
        self._store.add_items(self._find(request), items)
        return LongJson(self._state.turns, json_pieces(items_list(items)))

    @route(f"GET {ONE}/items/{{item_id}}", is_kept=True)
    async def retrieve_item(self, request: Request) -> Response:
        """An item of a conversation."""
        check_included(request.query_params)
        item = self._find_item(request, self._find(request))
        return LongJson(self._state.turns, json_pieces(item.fields()))

    @route(f"DELETE {ONE}/items/{{item_id}}", is_kept=True)
    async def delete_item(self, request: Request) -> Response:
        """Removes an item from a conversation."""
        conversation = self._find(request)
        self._store.remove_item(conversation, self._find_item(request, conversation))
        return json_response(conversation.body())

    async def _translated(self, conversation: Conversation, items: list[InputItem]) -> list[KeptItem]:
        conversation.check_room(len(items), "items")
        find = partial(self._store.find_items, owner=current_key.get())
        strict = self._state.settings.strict_fields

        def translated() -> list[KeptItem]:
            return new_items(item_messages(items, "items", find, strict=strict))

        new = await self._state.threads.in_thread(items_work(items), translated)
        conversation.check_room(len(new), "items")  # others may have come meanwhile
        return new

    def _find(self, request: Request) -> Conversation:
        return find_conversation(self._store, request.path_params["id"], "conversation_id")

    def _find_item(self, request: Request, conversation: Conversation) -> KeptItem:
        id = request.path_params["item_id"]
        if id not in conversation.items:
            message = f"Item with id {id[:100]!r} not found in the conversation."
            raise RequestError(404, message, type=NOT_FOUND, param="item_id")
        return conversation.items[id]


def find_conversation(store: ResponseStore, id: str, param: str) -> Conversation:
    """The conversation with this id. Raises RequestError 404, which names the field `param`, if there is none."""
    conversation = store.conversation(id, current_key.get())
    if conversation is None:
        message = f"Conversation with id {id[:100]!r} not found. It is not kept, or not any more."
        raise RequestError(404, message, type=NOT_FOUND, param=param)
    return conversation
