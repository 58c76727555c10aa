-- uses: groups
-- Answers the open groups of a shard.
local groups, lineage = {}, tonumber(redis.call('HGET', JOB .. ':job', 'lineage'))
for _, group in ipairs(redis.call('ZRANGE', index_key('open'), 0, -1)) do
  local row = redis.call('HMGET', group_key(group), 'shard', 'prompt', 'version')
  if row[1] == args.shard then
    groups[#groups + 1] = {group = tonumber(group), prompt = tonumber(row[2]),
      version = tonumber(row[3]), lineage = lineage}
  end
end
return cjson.encode({groups = groups})
