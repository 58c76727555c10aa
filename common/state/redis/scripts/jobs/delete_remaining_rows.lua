-- uses: groups
-- Deletes at most about `most` remaining rows of a deleted job. Answers whether more may remain.
local remaining = args.most
local function drop(index_key, make_key)
  for _, id in ipairs(redis.call('ZRANGE', index_key, 0, remaining - 1)) do
    redis.call('DEL', make_key(id))
    redis.call('ZREM', index_key, id)
    remaining = remaining - 1
  end
end
if not redis.call('ZSCORE', MESH .. ':jobs:deleting', args.job) then
  return cjson.encode({more = false})
end
for _, state in ipairs({'open', 'ready', 'leased'}) do
  if remaining > 0 then drop(index_key(state), group_key) end
end
if remaining > 0 then drop(JOB .. ':steps', function(id) return JOB .. ':step:' .. id end) end
if remaining > 0 then drop(JOB .. ':shards', function(name) return JOB .. ':shard:' .. name end) end
if remaining <= 0 then return cjson.encode({more = true}) end
redis.call('DEL', JOB .. ':requeue')
redis.call('DEL', JOB .. ':evaluations')
redis.call('ZREM', MESH .. ':jobs:deleting', args.job)
redis.call('ZADD', MESH .. ':jobs:in_store', NOW, args.job)
return cjson.encode({more = false})
