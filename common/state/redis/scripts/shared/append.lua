-- An event that belongs to no other script. One that is told under a lease needs that lease; one
-- that is to be `above` a time has a later one, or the next after all that are there.
local seen = previous_reply()
if seen then return seen end
if args.name and not has_lease(args.name, args.token) then return reject_fenced(args.name) end
local told = {err = 'not told yet'}
if args.above then
  told = redis.pcall('XADD', MESH .. ':events',
    string.format('%.0f-0', math.max(NOW, args.above + 1)),
    'kind', args.kind, 'fields', '{}', 'extra', args.fields)
end
if type(told) == 'table' then append_event(args.kind, nil, args.fields) end
return reply({appended = true})
