"""/v1/conversations: conversations that are kept under an id, and their items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import LongJson, json_response
from server.api.answers.forwarded import ForwardedAnswer
from server.api.request.body import BodyReader
from server.api.request.kept_objects import check_metadata
from server.api.route import ApiRoute
from server.api.routes.responses.conversation import Conversation, new_items
from server.api.routes.responses.items import KeptItem, items_list, items_page
from server.api.routes.responses.schemas import (
    CHANGE_FIELDS,
    CONVERSATION_FIELDS,
    NEW_ITEMS_FIELDS,
    ConversationChange,
    InputItem,
    NewConversation,
    NewItems,
)
from server.api.routes.responses.store import ResponseStore
from server.api.routes.responses.translation import (
    check_included,
    first_reference,
    item_messages,
    items_work,
)
from server.api.state import ServerState
from server.http.auth import current_key
from server.http.encoding import json_pieces
from server.http.request_error import NOT_FOUND, RequestError

CONVERSATIONS_PATH = "/v1/conversations"


def conversation_routes(state: ServerState, store: ResponseStore) -> list[ApiRoute]:
    """The routes of conversations, which are kept in the store of the responses."""
    conversations = Conversations(state, store)
    one = f"{CONVERSATIONS_PATH}/{{id}}"
    items, item = f"{one}/items", f"{one}/items/{{item_id}}"
    return [
        ApiRoute(
            path=CONVERSATIONS_PATH,
            endpoint=conversations.create,
            method="POST",
            body=NewConversation,
            summary="Begins a conversation.",
        ),
        ApiRoute(path=one, endpoint=conversations.retrieve, summary="A conversation, without its items."),
        ApiRoute(
            path=one,
            endpoint=conversations.update,
            method="POST",
            body=ConversationChange,
            summary="Changes the metadata of a conversation.",
        ),
        ApiRoute(path=one, endpoint=conversations.delete, method="DELETE", summary="Forgets a conversation."),
        ApiRoute(path=items, endpoint=conversations.list_items, summary="The items of a conversation."),
        ApiRoute(
            path=items,
            endpoint=conversations.create_items,
            method="POST",
            body=NewItems,
            summary="Adds items to a conversation.",
        ),
        ApiRoute(path=item, endpoint=conversations.retrieve_item, summary="An item of a conversation."),
        ApiRoute(
            path=item,
            endpoint=conversations.delete_item,
            method="DELETE",
            summary="Removes an item from a conversation.",
        ),
    ]


class Conversations:
    """Answers the routes of `conversation_routes`."""

    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self._state = state
        self._store = store
        self._strict = state.settings.strict_fields
        self._new = BodyReader(NewConversation, CONVERSATION_FIELDS, strict=self._strict)
        self._change = BodyReader(ConversationChange, CHANGE_FIELDS, strict=self._strict)
        self._new_items = BodyReader(NewItems, NEW_ITEMS_FIELDS, strict=self._strict)

    async def create(self, request: Request) -> Response:
        """Begins a conversation, with items if the body has some."""
        body, raw = await self._new.read_with_bytes(request, self._state.body_limits, self._state.threads)
        if (answer := await self._forwarded(request, raw, first_reference(body.items))) is not None:
            return answer
        check_metadata(body.metadata)
        conversation = Conversation(current_key.get(), body.metadata or {})
        conversation.add(await self._translated(conversation, body.items or []))
        self._store.put(conversation)
        return json_response(conversation.body())

    async def retrieve(self, request: Request) -> Response:
        """The conversation without its items."""
        return await self._forwarded_of(request) or json_response(self._find(request).body())

    async def update(self, request: Request) -> Response:
        """Replaces the metadata."""
        body, raw = await self._change.read_with_bytes(request, self._state.body_limits, self._state.threads)
        if (answer := await self._forwarded_of(request, raw)) is not None:
            return answer
        check_metadata(body.metadata)
        conversation = self._find(request)
        conversation.metadata = body.metadata or {}
        self._store.put(conversation)
        return json_response(conversation.body())

    async def delete(self, request: Request) -> Response:
        """Forgets the conversation. The responses of it stay."""
        if (answer := await self._forwarded_of(request)) is not None:
            return answer
        conversation = self._find(request)
        self._store.remove(conversation.id)
        return json_response({"id": conversation.id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        """The items in pages."""
        check_included(request.query_params)
        if (answer := await self._forwarded_of(request)) is not None:
            return answer
        items = [*self._find(request).items.values()]
        return LongJson(self._state.turns, json_pieces(items_page(items, request.query_params)))

    async def create_items(self, request: Request) -> Response:
        """Adds items at the end."""
        check_included(request.query_params)
        body, raw = await self._new_items.read_with_bytes(request, self._state.body_limits, self._state.threads)
        if (answer := await self._forwarded_of(request, raw)) is not None:
            return answer
        conversation = self._find(request)
        items = await self._translated(conversation, body.items)
        self._store.add_items(self._find(request), items)
        return LongJson(self._state.turns, json_pieces(items_list(items)))

    async def retrieve_item(self, request: Request) -> Response:
        """One item."""
        check_included(request.query_params)
        if (answer := await self._forwarded_of(request)) is not None:
            return answer
        item = self._find_item(request, self._find(request))
        return LongJson(self._state.turns, json_pieces(item.fields()))

    async def delete_item(self, request: Request) -> Response:
        """Removes one item."""
        if (answer := await self._forwarded_of(request)) is not None:
            return answer
        conversation = self._find(request)
        self._store.remove_item(conversation, self._find_item(request, conversation))
        return json_response(conversation.body())

    async def _translated(self, conversation: Conversation, items: list[InputItem]) -> list[KeptItem]:
        """The items for the conversation."""
        conversation.check_room(len(items), "items")
        find = partial(self._store.find_items, owner=current_key.get())
        new = await self._state.threads.in_thread(items_work(items), _translated, items, find, strict=self._strict)
        conversation.check_room(len(new), "items")  # others may have come meanwhile
        return new

    async def _forwarded_of(self, request: Request, raw: bytes = b"") -> Response | None:
        """The answer of the other process that keeps the conversation."""
        return await self._forwarded(request, raw, request.path_params["id"])

    async def _forwarded(self, request: Request, raw: bytes, id: str | None) -> Response | None:
        """The answer of the other process that keeps what has the id."""
        keeper = await self._store.keeper_of(id, request, self._state.peers)
        return None if keeper is None else ForwardedAnswer(request, keeper, raw)

    def _find(self, request: Request) -> Conversation:
        return find_conversation(self._store, request.path_params["id"], "conversation_id")

    def _find_item(self, request: Request, conversation: Conversation) -> KeptItem:
        id = request.path_params["item_id"]
        if id not in conversation.items:
            message = f"Item with id {id[:100]!r} not found in the conversation."
            raise RequestError(404, message, type=NOT_FOUND, param="item_id")
        return conversation.items[id]


def find_conversation(store: ResponseStore, id: str, param: str) -> Conversation:
    """Raises RequestError 404, which names the field `param`."""
    conversation = store.conversation(id, current_key.get())
    if conversation is None:
        message = f"Conversation with id {id[:100]!r} not found. It is not kept, or not any more."
        raise RequestError(404, message, type=NOT_FOUND, param=param)
    return conversation


def _translated(
    items: list[InputItem], find: Callable[[Iterable[str]], Mapping[str, KeptItem]], *, strict: bool
) -> list[KeptItem]:
    return new_items(item_messages(items, "items", find, strict=strict))
