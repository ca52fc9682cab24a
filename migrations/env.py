"""Runs migrations on the connection that `loraplex.database` passes in `attributes`."""

from alembic import context
from sqlalchemy import Connection

from adapter_store.registry.rollup_models import Base  # its tables, and those of `models`


def run(connection: Connection) -> None:
    """All steps in one transaction, on SQLite too: a failed upgrade leaves the old schema."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
