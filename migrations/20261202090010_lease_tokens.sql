-- The token of a claim. A sequence alone may give a number again after a failover that lost commits, and then two workers would
-- hold one job by the same token; so 16 bits are random.

create function new_lease() returns bigint
    language sql volatile
    return (nextval('leases') << 16) | floor(random() * 65536)::bigint;
