-- uses: groups
-- Ends a group that cannot train: by its shard while it is open, or by the trainer that leased it
-- and found it bad, or without anything to teach: then its members that failed are told apart.
local seen = previous_reply()
if seen then return seen end
if not has_lease(args.name, args.token) then return reject_fenced(args.name) end
local row = read_hash(group_key(args.group))
local own = row.state == 'open' and row.shard == args.name
  or row.state == 'leased' and tonumber(row.trainer_token) == args.token
if not own then
  return reject('refused', 'group ' .. args.group .. ' is not ' .. args.name .. "'s to give back")
end
return_group(args.group, row, args.requeue)
local failed = args.counter == 'filtered' and row.samples - row.scored or 0
add_count(args.counter, row.samples - failed)
add_count('typed_drops', failed)
if args.kind == 'stale' then
  append_event('stale', {job = args.job,
    version = tonumber(redis.call('HGET', JOB .. ':job', 'version')),
    groups = {{group = args.group, prompt = tonumber(row.prompt), samples = tonumber(row.samples),
      min_version = tonumber(row.min_version)}}})
  return reply({returned = true})
end
append_event(args.kind, {job = args.job, group = args.group, prompt = tonumber(row.prompt),
  samples = row.samples - failed, failed = failed, reason = args.reason, by = args.name})
return reply({returned = true})
