-- uses: groups
-- Records a durable checkpoint of the current version, from which any later trainer resumes the
-- job. Covered steps drop their groups, which are never replayed again.
if not has_lease(args.trainer, args.token) then return reject_fenced(args.trainer) end
local job = read_hash(JOB .. ':job')
if tonumber(job.lineage) ~= args.lineage or tonumber(job.version) ~= args.step then
  return reject('refused', 'version ' .. args.step .. ' of lineage ' .. args.lineage ..
    ' is not the current one, which is ' .. tostring(job.version) .. ' of lineage ' ..
    tostring(job.lineage))
end
local uncovered = '(' .. job.checkpointed_version
for _, id in ipairs(redis.call('ZRANGEBYSCORE', JOB .. ':steps', uncovered, args.step)) do
  redis.call('HDEL', JOB .. ':step:' .. id, 'groups', 'record')
end
redis.call('HSET', JOB .. ':job', 'checkpoint', args.checkpoint, 'checkpointed_version',
  math.max(args.step, tonumber(job.checkpointed_version)))
return cjson.encode({checkpointed_version = args.step})
