-- uses: groups
-- A durable checkpoint holds the current version: the job goes on from it, whoever trains it next.
if not has_lease(args.trainer, args.token) then return reject_fenced(args.trainer) end
local job = read_hash(JOB .. ':job')
if tonumber(job.lineage) ~= args.lineage or tonumber(job.version) ~= args.step then
  return reject('refused', 'version ' .. args.step .. ' of lineage ' .. args.lineage ..
    ' is not the current one, which is ' .. tostring(job.version) .. ' of lineage ' ..
    tostring(job.lineage))
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. job.checkpointed_version,
  args.step)) do
  redis.call('HDEL', JOB .. ':step:' .. id, 'groups', 'record')
end
redis.call('HSET', JOB .. ':job', 'checkpoint', args.checkpoint, 'checkpointed_version',
  math.max(args.step, tonumber(job.checkpointed_version)))
return cjson.encode({checkpointed_version = args.step})
