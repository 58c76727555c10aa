-- uses: groups
-- Answers the digests of the group data that a step may still fetch. These are groups that are
-- ready or leased, and groups of steps that no checkpoint covers.
local digests = {}
for _, state in ipairs({'ready', 'leased'}) do
  for _, group in ipairs(redis.call('ZRANGE', index_key(state), 0, -1)) do
    digests[#digests + 1] = redis.call('HGET', group_key(group), 'digest')
  end
end
local covered = redis.call('HGET', JOB .. ':job', 'checkpointed_version') or '-1'
for _, id in ipairs(redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. covered, '+inf')) do
  local rows = redis.call('HGET', JOB .. ':step:' .. id, 'groups')
  for _, row in ipairs(rows and cjson.decode(rows) or {}) do digests[#digests + 1] = row.digest end
end
return cjson.encode({digests = digests})
