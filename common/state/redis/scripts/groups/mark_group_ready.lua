-- uses: groups
-- Marks a finished group as ready to train; its data is durable.
local previous = previous_reply()
if previous then return previous end
if not has_lease(args.shard, args.token) then return reject_fenced(args.shard) end
local row = read_hash(group_key(args.group))
if row.state ~= 'open' or row.shard ~= args.shard then
  return reject('refused', 'group ' .. args.group .. ' is not open at ' .. args.shard)
end
redis.call('HSET', group_key(args.group), 'digest', args.digest, 'nbytes', args.nbytes,
  'min_version', args.min_version, 'scored', args.scored)
move_group(args.group, 'open', 'ready')
record_progress(JOB)
append_event('ready', {job = args.job, group = args.group, samples = tonumber(row.samples),
  scored = args.scored, digest = args.digest, by = args.shard})
return reply({ready = true})
