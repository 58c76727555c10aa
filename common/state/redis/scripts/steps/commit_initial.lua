-- Commits version 0, whose weights sample the first groups. A repetition with the same manifest is
-- allowed.
if not has_lease(args.trainer, args.token) then return reject_fenced(args.trainer) end
local key = KEYS[1] .. ':job'
local job = read_hash(key)
if not job.version then return reject('not_found', 'there is no job ' .. args.job) end
if tonumber(job.version) >= 0 then
  if job.initial_manifest == args.manifest then
    return cjson.encode({version = tonumber(job.version)})
  end
  return reject('refused', args.job .. ' already has version ' .. job.version ..
    ', started from other weights')
end
redis.call('HSET', key, 'lineage', args.lineage, 'version', 0, 'manifest', args.manifest,
  'checkpoint', args.checkpoint, 'image', args.image, 'masters', args.masters,
  'initial_manifest', args.manifest, 'steps_done', 0)
record_progress(KEYS[1])
append_event('initial', {job = args.job, lineage = args.lineage, version = 0,
  manifest = args.manifest, checkpoint = args.checkpoint, image = args.image,
  masters = args.masters})
return cjson.encode({version = 0})
