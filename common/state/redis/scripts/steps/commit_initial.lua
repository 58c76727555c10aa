-- Version 0: the weights that the first groups are sampled from.
if not holds(a.trainer, a.token) then return fenced(a.trainer) end
local key = KEYS[1] .. ':job'
local job = hash(key)
if not job.version then return refuse('not_found', 'there is no job ' .. a.job) end
if tonumber(job.version) >= 0 then
  if job.initial_manifest == a.manifest then
    return cjson.encode({version = tonumber(job.version)})
  end
  return refuse('refused', a.job .. ' has version ' .. job.version ..
    ' already, begun from other weights')
end
redis.call('HSET', key, 'lineage', a.lineage, 'version', 0, 'manifest', a.manifest,
  'checkpoint', a.checkpoint, 'image', a.image, 'masters', a.masters,
  'initial_manifest', a.manifest, 'steps_done', 0)
progressed(KEYS[1])
event('initial', {job = a.job, lineage = a.lineage, version = 0, manifest = a.manifest,
  checkpoint = a.checkpoint, image = a.image, masters = a.masters})
return cjson.encode({version = 0})
