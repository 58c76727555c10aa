-- uses: groups
-- Digests of the bytes that a step may still ask for: of groups that are ready or leased, and of
-- those in steps that no checkpoint covers.
local found = {}
for _, name in ipairs({'ready', 'leased'}) do
  for _, group in ipairs(redis.call('ZRANGE', index_key(name), 0, -1)) do
    found[#found + 1] = redis.call('HGET', group_key(group), 'digest')
  end
end
local covered = redis.call('HGET', JOB .. ':job', 'checkpointed_version') or '-1'
for _, id in ipairs(redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. covered, '+inf')) do
  local rows = redis.call('HGET', JOB .. ':step:' .. id, 'groups')
  for _, row in ipairs(rows and cjson.decode(rows) or {}) do found[#found + 1] = row.digest end
end
return cjson.encode({digests = found})
