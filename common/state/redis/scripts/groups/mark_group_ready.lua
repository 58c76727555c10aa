-- uses: groups
-- A finished group, whose bytes are durable, may train.
local seen = previous_reply()
if seen then return seen end
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
  scored = args.scored,
  digest = args.digest, by = args.shard})
return reply({ready = true})
