#!/bin/sh
# Brings Temporal's two databases to the schema of this release. Safe to run again: what is there is left as it is.
set -eu

for database in temporal visibility; do
    case $database in
        temporal) name=temporal ;;
        *) name=temporal_visibility ;;
    esac
    sql() {
        temporal-sql-tool --plugin postgres12 --ep "$POSTGRES_SEEDS" -p "$DB_PORT" -u "$POSTGRES_USER" --db "$name" "$@"
    }
    sql create
    sql setup-schema -v 0.0
    sql update-schema -d "/etc/temporal/schema/postgresql/v12/$database/versioned"
done
