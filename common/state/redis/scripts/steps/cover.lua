-- uses: groups
-- A durable checkpoint holds the current version: the job goes on from it, whoever trains it next.
if not holds(a.trainer, a.token) then return fenced(a.trainer) end
local job = hash(JOB .. ':job')
if tonumber(job.lineage) ~= a.lineage or tonumber(job.version) ~= a.step then
  return refuse('refused', 'version ' .. a.step .. ' of lineage ' .. a.lineage ..
    ' is not the current one, which is ' .. tostring(job.version) .. ' of lineage ' ..
    tostring(job.lineage))
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. job.covered, a.step)) do
  redis.call('HDEL', JOB .. ':step:' .. id, 'groups', 'record')
end
redis.call('HSET', JOB .. ':job', 'checkpoint', a.checkpoint, 'covered',
  math.max(a.step, tonumber(job.covered)))
return cjson.encode({covered = a.step})
